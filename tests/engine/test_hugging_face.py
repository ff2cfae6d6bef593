"""Models of Hugging Face's library train over ZeRO ranks like in one process, their code untouched."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import LossSum, parallelize
from meshwright.comm.connect import Groups
from meshwright.layout.layout import Layout
from pool import RankPool

transformers = pytest.importorskip("transformers")

STEPS = 3


def model(name: str) -> nn.Module:
    """A tiny one with everything that large ones have."""
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=12, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        made = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        made = transformers.LlamaForCausalLM(config)
    double: nn.Module = made.double()
    return double


def batch(step: int) -> Tensor:
    return torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(step))


def loss(module: nn.Module, tokens: Tensor) -> LossSum:
    mean = module(input_ids=tokens, labels=tokens, use_cache=False).loss
    count = tokens[:, 1:].numel()
    return LossSum(mean.double() * count, count)


def ours(groups: Groups, name: str, layout: Layout, checkpointing: bool) -> tuple[list[float], dict[str, Tensor]]:
    module: Any = model(name)
    if checkpointing:
        module.gradient_checkpointing_enable()
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    trained = parallelize(module, layout, optimizer=optimizer, loss=loss, groups=groups)
    losses = [trained.step([batch(step).chunk(layout.data)[groups.data.index]]).loss for step in range(STEPS)]
    return losses, trained.state_dict()


def plain(name: str) -> tuple[list[float], dict[str, Tensor]]:
    module = model(name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        found = loss(module, batch(step))
        mean = found.total / found.count
        optimizer.zero_grad()
        torch.autograd.backward(mean)
        optimizer.step()
        losses.append(mean.item())
    return losses, module.state_dict()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("text", ["dp2/zero1", "dp2/zero3", "dp4/zero3/shard2"])
def test_a_hugging_face_model_trains_like_in_one_process(
    gloo_pool: RankPool, text: str, name: str, checkpointing: bool
) -> None:
    layout = Layout.parse(text)
    losses, weights = plain(name)
    for own_losses, own_weights in gloo_pool.run(layout.mesh, ours, name, layout, checkpointing):
        assert own_losses == pytest.approx(losses, rel=1e-6)  # the loss itself is computed in float32
        for key, value in weights.items():
            torch.testing.assert_close(own_weights[key], value, rtol=1e-4, atol=1e-4)
