"""Check an installed tiltsam that has nothing but torch: import, types, a training step, the command."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import torch

import tiltsam

assert tiltsam.__version__ == version("tiltsam") == sys.argv[1], (tiltsam.__version__, sys.argv[1])
assert files("tiltsam").joinpath("py.typed").is_file()
assert files("tiltsam").joinpath("lab/report/assets").is_dir()
assert "site-packages" in str(tiltsam.__file__), tiltsam.__file__

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
optimizer = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)


def closure() -> torch.Tensor:
    """Run forward and backward."""
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss


losses = [float(optimizer.step(closure)) for _ in range(50)]
assert losses[-1] < losses[0], losses

for arguments in (["--version"], ["methods"], ["train", "--help"]):
    subprocess.run([sys.executable, "-m", "tiltsam", *arguments], check=True, stdout=subprocess.DEVNULL)
# Without the lab's packages, training ends with a line that says what to install.
run = subprocess.run([sys.executable, "-m", "tiltsam", "demo"], capture_output=True, text=True)
assert run.returncode == 2, run.stderr
assert "pip install" in run.stderr, run.stderr
print(f"tiltsam {tiltsam.__version__} from {sys.argv[2]} works with torch {torch.__version__} alone")
