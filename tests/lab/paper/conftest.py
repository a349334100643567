import pytest
import torch

from helpers import lab_files
from tiltsam.lab import models
from tiltsam.lab.data import GLUE
from tiltsam.lab.paper.settings import DISTILBERT, VIT


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    """Return a folder with small data files in the published layouts."""
    root = tmp_path_factory.mktemp("paper")
    lab_files.cifar(root / "data", fine=True, n=6)
    lab_files.tiny(root / "data")
    lab_files.dtd(root / "data")
    for task in GLUE:
        lab_files.glue(root / "data", task)
    return root


@pytest.fixture(scope="session")
def pretrained(here):
    """Write small pretrained models under their real names, relative to ``here``."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    vit = transformers.ViTConfig(
        image_size=224, patch_size=112, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.ViTForImageClassification(vit).save_pretrained(here / VIT.removeprefix("hf:"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "said", "no", "more", "reply", '"']
    bert = here / DISTILBERT.removeprefix("hf:")
    bert.mkdir(parents=True)
    (bert / "vocab.txt").write_text("\n".join(words))
    transformers.DistilBertTokenizerFast(vocab=str(bert / "vocab.txt")).save_pretrained(bert)
    config = transformers.DistilBertConfig(
        vocab_size=len(words), dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=64
    )
    transformers.DistilBertModel(config).save_pretrained(bert)


@pytest.fixture
def narrow(monkeypatch):
    """Replace the residual networks by two convolutions, which train in a moment."""
    for name in ("resnet18", "resnet34", "wrn16-8"):
        monkeypatch.setitem(models.MODELS, name, lambda classes, **_: models.cnn(classes, channels=3, width=4))


@pytest.fixture
def places(here, tmp_path):
    """Return the folders of the runs and of the data, as ``reproduce`` takes them."""
    return {"out": tmp_path / "runs", "root": here / "data"}
