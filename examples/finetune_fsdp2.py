"""Fine-tune a language model with TSAM on several GPUs: FSDP2, bf16 passes, float32 weights, micro-batches, clipping.

    torchrun --nproc-per-node 8 examples/finetune_fsdp2.py --model FOLDER --text FILE.txt --out CHECKPOINT
    torchrun --nproc-per-node 2 examples/finetune_fsdp2.py        # a tiny model with random weights, also on a CPU

Every rank has the weights that a single process would have. Memory above plain AdamW: one copy of the weights, sharded
like them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tiltsam


def load(args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return the model and the tokens of the text; without ``--model`` a tiny one that reads bytes."""
    text = args.text.read_text()
    if args.model is not None:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokens = transformers.AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
        return model, torch.tensor(tokens)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    return model, torch.tensor(list(text.encode()))


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a pretrained causal language model")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="training text; by default this script")
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch, on each rank")
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--num-samples", type=int, default=1, help="s: a step takes 2s passes")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    model, tokens = load(args)
    model.to(device)
    mesh = init_device_mesh(device.type, (size,))
    # Gathered in bf16, reduced in float32. The sharded weights stay float32: bf16 would round a perturbation away.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    base = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after fully_shard, which makes new parameters
    optimizer = tiltsam.TSAM(base, rho=args.rho, num_samples=args.num_samples, model=model)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    base.register_step_pre_hook(clip)  # sees the aggregate gradient
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    random = torch.Generator().manual_seed(1 + rank)  # other sequences on each rank

    for step in range(args.steps):
        starts = torch.randint(len(tokens) - args.length, (args.micro_batches, args.batch, 1), generator=random)
        batch = tokens[starts + torch.arange(args.length + 1)].to(device)

        def closure(batch: Tensor = batch) -> Tensor:
            total = torch.zeros((), device=device)
            for part in batch:  # gradients add up over micro-batches
                logits = model(part[:, :-1], use_cache=False).logits.float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / len(batch)
                loss.backward()
                total += loss.detach()
            return total

        loss = optimizer.step(closure)
        schedule.step()
        if rank == 0 and step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if args.out:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        save(state, checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
