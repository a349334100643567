"""Adapters of peft: a step costs and changes the trainable tensors alone."""

import copy

import pytest
import torch
from torch import nn

import tiltsam
from timing import allocated_peak


def lora(width=32, rank=4, dtype=torch.float64):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")  # slow to import
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * width,
        vocab_size=64,
        max_position_embeddings=16,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    adapters = peft.LoraConfig(
        r=rank, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights="gaussian"
    )
    return peft.get_peft_model(model, adapters)


def lm_loss(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("everything", [False, True], ids=["trainable", "all-parameters"])
def test_tsam_with_lora_equals_tsam_on_the_trainable_tensors(num_samples, everything):
    """The twin knows of no frozen weight: its optimizer holds bare tensors, which a functional call puts in place."""
    model = lora()
    twin = copy.deepcopy(model)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    params = model.parameters() if everything else [p for p in model.parameters() if p.requires_grad]
    tsam = tiltsam.TSAM(torch.optim.AdamW(params, lr=1e-2), num_samples=num_samples, model=model)
    alone = {name: nn.Parameter(p.detach().clone()) for name, p in twin.named_parameters() if p.requires_grad}
    assert 0 < sum(p.numel() for p in alone.values()) < 0.2 * sum(p.numel() for p in frozen.values())
    bare = nn.ParameterList(alone.values())
    tsam_alone = tiltsam.TSAM(torch.optim.AdamW(bare.parameters(), lr=1e-2), num_samples=num_samples, model=bare)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        tokens = torch.randint(64, (2, 12), generator=generator)

        def closure(tokens=tokens):
            loss = lm_loss(model(tokens).logits, tokens)
            loss.backward()
            return loss

        def closure_alone(tokens=tokens):
            loss = lm_loss(torch.func.functional_call(twin, alone, (tokens,)).logits, tokens)
            loss.backward()
            return loss

        torch.manual_seed(step)  # dropout
        loss = tsam.step(closure)
        torch.manual_seed(step)
        assert torch.equal(loss, tsam_alone.step(closure_alone))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        assert torch.equal(p, alone[name]), name
        for key, value in tsam.state[p].items():
            assert torch.equal(value, tsam_alone.state[alone[name]][key]), (name, key)
    assert len(tsam.state) == len(tsam_alone.state) == len(trained)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_memory_above_the_base_is_that_of_the_adapters():
    model = lora(256, 64, torch.float32)
    tokens = torch.randint(64, (1, 4))
    trained = [p for p in model.parameters() if p.requires_grad]

    def closure():
        loss = lm_loss(model(tokens).logits, tokens)
        loss.backward()
        return loss

    def plain():
        base = torch.optim.AdamW(trained, fused=True)
        for _ in range(3):
            base.zero_grad()
            closure()
            base.step()

    def tsam():
        optimizer = tiltsam.TSAM(torch.optim.AdamW(model.parameters(), fused=True), num_samples=3, model=model)
        for _ in range(3):
            optimizer.step(closure)

    cpu = torch.device("cpu")
    above = allocated_peak(tsam, cpu)
    model.zero_grad()
    above -= allocated_peak(plain, cpu)
    assert above == pytest.approx(2 * sum(p.nbytes for p in trained), rel=0.02)
