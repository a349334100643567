"""Decode image files of all kinds."""

import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base

from tiltsam.lab.data import images
from tiltsam.lab.data.images import read_images
from tiltsam.lab.errors import DataError

QUARTERS = np.kron(np.array([[10, 80], [160, 240]], np.uint8), np.ones((8, 8), np.uint8))


def test_read_images_interrupt_cancels_the_rest(monkeypatch):
    asked, decoded = threading.Event(), []

    class Interrupted(list):
        def __iter__(self):
            yield from super().__iter__()
            asked.set()
            raise KeyboardInterrupt

    def decode(path, size):
        asked.wait()
        time.sleep(0.01)
        decoded.append(path)
        return np.zeros((size, size, 3), np.uint8)

    monkeypatch.setattr(images, "_decode", decode)
    with pytest.raises(KeyboardInterrupt):
        read_images(Interrupted(range(1000)), 2)
    assert len(decoded) < 1000


@pytest.mark.parametrize("name", ["grey.png", "grey.tif"])
def test_read_images_16_bit_grey(name, tmp_path):
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    Image.fromarray(levels).save(tmp_path / name)
    (image,) = read_images([tmp_path / name], 8)
    assert torch.equal(image, torch.from_numpy(levels // 256).to(torch.uint8).expand(3, 8, 8))


@pytest.mark.parametrize("white", [1023, 65535])
def test_read_images_16_bit_pgm(white, tmp_path):
    levels = np.arange(64).reshape(8, 8) * white // 63
    header = f"P5 8 8 {white}\n".encode()
    (tmp_path / "grey.pgm").write_bytes(header + levels.astype(">u2").tobytes())
    (image,) = read_images([tmp_path / "grey.pgm"], 8)
    expected = torch.from_numpy(levels * 65535 // white // 256).expand(3, 8, 8)
    assert (image.int() - expected).abs().max() <= 1
    assert image.max() == 255


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_read_images_refuses_32_bit_grey(dtype, tmp_path):
    Image.fromarray(np.full((8, 8), 200, dtype)).save(tmp_path / "grey.tif")
    with pytest.raises(DataError, match=r"grey\.tif"):
        read_images([tmp_path / "grey.tif"], 8)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.jpg", "RGB"), ("a.png", "RGB"), ("a.tif", "RGB"), ("a.webp", "RGB"), ("a.png", "I;16"), ("a.tif", "I;16")],
)
@pytest.mark.parametrize("orientation", range(10))
def test_read_images_applies_exif(name, mode, orientation, tmp_path):
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    levels = QUARTERS if mode == "RGB" else QUARTERS.astype(np.uint16) << 8
    picture = Image.fromarray(levels).convert(mode)
    picture.save(tmp_path / name, exif=exif, **({"lossless": True} if name == "a.webp" else {}))
    (image,) = read_images([tmp_path / name], 16)
    # The meaning of each number: where the first row and the first column of the file are shown.
    turn = {2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 5: np.transpose, 6: lambda x: np.rot90(x, -1)}
    turn |= {7: lambda x: np.rot90(x, 2).T, 8: np.rot90}
    upright = torch.from_numpy(turn.get(orientation, np.asarray)(QUARTERS).astype(np.float32))
    torch.testing.assert_close(image.float(), upright.expand(3, 16, 16), atol=3, rtol=0)


def test_read_images_ignores_damaged_exif(tmp_path):
    Image.fromarray(QUARTERS).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00nothing of the kind")
    (image,) = read_images([tmp_path / "a.jpg"], 16)
    torch.testing.assert_close(image[0].float(), torch.from_numpy(QUARTERS).float(), atol=3, rtol=0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_read_images_composes_transparency_onto_white(mode, tmp_path):
    levels = np.full((8, 8), 200, np.uint8)
    levels[:, 4:] = 40  # the hidden colour of the transparent half
    picture, options = Image.fromarray(levels), {}
    if mode in ("RGBA", "LA"):
        alpha = np.where(levels == 40, 0, 255).astype(np.uint8)
        alpha[0, 0] = 51  # a fifth: 200 / 5 + 255 * 4 / 5
        picture.putalpha(Image.fromarray(alpha))
        picture = picture.convert(mode)
    else:
        picture = picture.convert(mode)
        options["transparency"] = (40, 40, 40) if mode == "RGB" else int(np.asarray(picture)[0, 7])
    picture.save(tmp_path / "a.png", **options)
    (image,) = read_images([tmp_path / "a.png"], 8)
    expected = torch.full((3, 8, 8), 200, dtype=torch.uint8)
    expected[:, :, 4:] = 255
    if mode in ("RGBA", "LA"):
        expected[:, 0, 0] = 244
    assert torch.equal(image, expected)
