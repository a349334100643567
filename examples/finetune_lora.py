"""Fine-tune a language model with TSAM and LoRA on one GPU: frozen bf16 weights, float32 adapters, captured steps.

    python examples/finetune_lora.py --model FOLDER --text FILE.txt --out ADAPTER
    python examples/finetune_lora.py                              # a tiny model with random weights, also on a CPU

Only the adapters are perturbed, copied and updated: memory above plain AdamW is one copy of them. Needs ``peft``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor, nn

import tiltsam


def load(args: argparse.Namespace, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Return the model and the tokens of the text; without ``--model`` a tiny one that reads bytes."""
    text = args.text.read_text()
    if args.model is not None:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        tokens = transformers.AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
        return model, torch.tensor(tokens)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    return model.to(dtype), torch.tensor(list(text.encode()))


def main() -> None:
    """Train and save the adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a pretrained causal language model")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="training text; by default this script")
    parser.add_argument("--out", type=Path, help="folder for the adapters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--num-samples", type=int, default=1, help="s: a step takes 2s passes")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    frozen, tokens = load(args, dtype)
    adapters = peft.LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(frozen, adapters).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)  # as peft makes them: bf16 would round a perturbation away
    print(f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} weights are trained")

    base = torch.optim.AdamW(trained, lr=args.lr)
    optimizer = tiltsam.TSAM(base, rho=args.rho, num_samples=args.num_samples, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    def loss_fn(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    random = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        starts = torch.randint(len(tokens) - args.length, (args.batch, 1), generator=random)
        return tokens[starts + torch.arange(args.length + 1)].to(device)

    take_step = tiltsam.capture(optimizer, loss_fn)  # one CUDA graph; eager on a CPU
    for step in range(args.steps):
        loss = take_step(draw())
        schedule.step()
        if step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if args.out:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
