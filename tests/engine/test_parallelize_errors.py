"""What cannot be done is said with the reason and what works; and after an error the next step is right."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from any_module import Layer
from torch import Tensor, nn

from meshwright import LossSum, parallelize
from meshwright.comm.connect import Groups
from meshwright.layout.layout import Layout
from pool import RankPool

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Layer(6), nn.Linear(6, 2)).double()


def mean_square(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x).square().mean()
    return y


def x(rank: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


# --- before anything is done ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp2.tp2/zero1", "tp=2 and pp=1 need to know what is inside; try dp4/zero1"),
        ("dp2.pp2", "tp=1 and pp=2 need to know what is inside; try dp4/zero0"),
        ("dp1/recompute-full", "up to the module itself; leave out recompute-full, and"),
        ("dp1/pa", "up to the module itself; leave out pa, and"),
        ("dp4/zero1/shard3", "shard=3 does not divide dp=4; try shard=2 or 4"),
        ("dp2", r"needs 2 ranks, and this process was started alone; start it with torchrun --nproc-per-node 2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        parallelize(net(), layout, optimizer=ADAMW)


def other_groups(groups: Groups) -> str:
    with pytest.raises(ValueError, match="ranks") as caught:
        parallelize(net(), "dp4/zero1", optimizer=ADAMW, groups=groups)
    return str(caught.value)


def test_groups_of_another_number_of_ranks_are_refused(gloo_pool: RankPool) -> None:
    message, _ = gloo_pool.run(Layout(data=2).mesh, other_groups)
    assert "needs 4 ranks on its data axis, but the groups are of Mesh(data=2" in message


class Parts(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.ReLU(), {}, "ReLU has no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), {}, "no parameter of Linear is trained"),
        (nn.Linear(2, 2), {"parameter_groups": []}, "no parameter of Linear is trained"),
        (Parts(a=nn.Linear(2, 2, device="meta")), {}, "a.weight has no values yet; make the module on a real device"),
        (nn.LazyLinear(3), {}, "weight has no values yet"),
        (Parts(z=nn.Parameter(torch.zeros(2, dtype=torch.complex64))), {}, "z is complex; train its real view"),
        (nn.Linear(2, 2), {"parameter_groups": [torch.zeros(1)]}, 'group 0 is not a dict with "params"'),
        (nn.Linear(2, 2), {"parameter_groups": [{"params": nn.Linear(2, 2).parameters()}]}, "of another module"),
        (nn.Linear(2, 2), {"units": 0}, "units=0 leaves no parameter for a block"),
        (nn.Linear(2, 2), {"units": nn.LSTM}, "the module has no LSTM; it has Linear"),
        (Parts(a=nn.ModuleList([nn.Linear(2, 2)])), {"units": nn.ModuleList}, "ModuleList is never called"),
        (nn.Linear(2, 2).bfloat16(), {"reduce_dtype": torch.float16}, "take torch.bfloat16 or torch.float32"),
        (nn.Linear(2, 2), {"reduce_dtype": torch.bfloat16}, "torch.float32 cannot be reduced in torch.bfloat16"),
        (nn.Linear(2, 2), {"optimizer": torch.optim.LBFGS}, "cannot step flat pieces|element by element"),
        (nn.Linear(2, 2), {"optimizer": torch.optim.Adafactor}, "element by element"),
    ],
)
def test_modules_and_options_that_do_not_fit_are_refused(module: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(module, "dp1", **({"optimizer": ADAMW} | options))


def test_a_parameter_in_two_groups_is_refused_by_its_name() -> None:
    module = nn.Linear(2, 2)
    groups = [{"params": [module.weight]}, {"params": list(module.parameters())}]
    with pytest.raises(ValueError, match="weight is in the parameter groups 0 and 1; keep one of them"):
        parallelize(module, "dp1", optimizer=ADAMW, parameter_groups=groups)


# --- while training ---------------------------------------------------------------------------------------------------


def test_steps_that_cannot_be_done_are_refused() -> None:
    model = parallelize(net(), "dp1", optimizer=ADAMW)
    with pytest.raises(ValueError, match="no loss function; give it one, or use `backward` and `update`"):
        model.step([x()])
    model = parallelize(net(), "dp1/m2", optimizer=ADAMW, loss=mean_square)
    with pytest.raises(ValueError, match=r"3 micro-batches were given; the layout .* takes up to 2"):
        model.step([x()] * 3)
    with pytest.raises(ValueError, match="nothing to learn from"):
        model.step([])
    with pytest.raises(ValueError, match="anything to evaluate"):
        model.evaluate([])
    model.backward(mean_square(model, x()))
    with pytest.raises(RuntimeError, match=re.escape("gradients of `backward` wait for `update`")):
        model.step([x()])
    model.update()
    model.step([x()])


def bare_backward(groups: Groups, layout: Layout) -> tuple[str, float]:
    model = parallelize(net(), layout, optimizer=ADAMW, loss=mean_square, groups=groups, units=nn.Linear)
    loss = mean_square(model, x(groups.data.index))
    with pytest.raises(RuntimeError) as bare:
        loss.backward()
    return str(bare.value), model.step([x(groups.data.index)]).gradient_norm


@pytest.mark.parametrize("text", ["dp2", "dp2/zero2", "dp2/zero3"])
def test_backward_of_the_loss_itself_says_what_to_call_and_leaves_nothing_behind(
    gloo_pool: RankPool, text: str
) -> None:
    layout = Layout.parse(text)
    module = net()
    (sum(mean_square(module, x(rank)) for rank in range(2)) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))
    for bare, found in gloo_pool.run(layout.mesh, bare_backward, layout):
        assert "call `backward(loss)` of what `parallelize` returned" in bare or "`backward` of what" in bare
        assert found == pytest.approx(norm, rel=1e-10)


def one_sided(groups: Groups, layout: Layout, sides: int) -> float | str:
    """Only the first `sides` ranks have a loss that depends on the module."""

    def loss(module: Any, y: Tensor) -> Tensor:
        return mean_square(module, y) if groups.data.index < sides else torch.zeros((), dtype=torch.float64)

    model = parallelize(net(), layout, optimizer=ADAMW, loss=loss, groups=groups, units=nn.Linear)
    with torch.inference_mode():
        model(x())
    try:
        norm = model.step([x()]).gradient_norm
    except ValueError as error:
        return str(error)
    with pytest.raises(ValueError, match=r"has hooks|is divided already"):
        parallelize(model.module, layout, optimizer=ADAMW, groups=groups)
    return norm


@pytest.mark.parametrize("text", ["dp2/zero1", "dp2/zero3"])
def test_a_rank_whose_loss_depends_on_nothing_takes_part_and_all_such_ranks_are_an_error(
    gloo_pool: RankPool, text: str
) -> None:
    layout = Layout.parse(text)
    module = net()
    (mean_square(module, x()) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))
    assert gloo_pool.run(layout.mesh, one_sided, layout, 1) == pytest.approx([norm] * 2, rel=1e-10)
    for message in gloo_pool.run(layout.mesh, one_sided, layout, 0):
        assert "depend on no parameter that is trained" in message


class Penalized(nn.Module):
    """Its output has a gradient in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, y: Tensor) -> Tensor:
        y = y.requires_grad_()
        value = self.two(torch.tanh(self.one(y)))
        z: Tensor = torch.autograd.grad(value.sum(), y, create_graph=True)[0]
        return z


def penalized(groups: Groups, layout: Layout) -> str | float:
    torch.manual_seed(0)
    module = Penalized().double()
    model = parallelize(module, layout, optimizer=ADAMW, loss=mean_square, groups=groups, units=nn.Linear)
    try:
        return model.step([x()]).gradient_norm
    except RuntimeError as error:
        return str(error)


def test_a_gradient_of_gradients_is_right_or_refused(gloo_pool: RankPool, pool: RankPool) -> None:
    torch.manual_seed(0)
    module = Penalized().double()
    mean_square(module, x()).backward()
    expected = pytest.approx(float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)), rel=1e-10)
    two, three = Layout.parse("dp2/zero2"), Layout.parse("dp2/zero3")
    assert gloo_pool.run(two.mesh, penalized, two)[0] == expected
    assert pool.run(three.mesh, penalized, three)[0] == expected
    assert "take stage 2" in gloo_pool.run(three.mesh, penalized, three)[0]


class Fragile(nn.Module):
    """Raises in the middle of a forward or a backward pass when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4) for _ in range(4))
        self.fails = ""

    def forward(self, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            y = layer(y)
            if number == 1 and self.fails == "forward":
                raise OSError("no more data")
            if number == 1 and self.fails == "backward":
                y.register_hook(self._fail)
        return y

    def _fail(self, _: Tensor) -> None:
        raise OSError("no more memory")


def failing(groups: Groups, layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = Fragile().double()
    model = parallelize(module, layout, optimizer=ADAMW, loss=mean_square, groups=groups, units=Layer)
    mine = [x(groups.data.index), x(groups.data.index + 2)]
    norms = [model.step(mine).gradient_norm]
    for fails in ("forward", "backward"):
        for attempt in (lambda: model.step(mine), lambda: model.backward(mean_square(model.module, mine[0]))):
            module.fails = fails
            with pytest.raises(OSError, match="no more"):
                attempt()
            module.fails = ""
        norms.append(model.step(mine).gradient_norm)
    return norms


@pytest.mark.parametrize("text", ["dp2/zero1/m2", "dp2/zero2/m2", "dp2/zero3/m2", "dp2/zero3/m2/prefetch0"])
def test_after_an_error_on_all_ranks_the_next_step_is_that_of_a_run_without_it(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    torch.manual_seed(0)
    module = Fragile().double()
    optimizer, norms = ADAMW(module.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        (sum(mean_square(module, x(number)) for number in range(4)) / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)))
        optimizer.step()
    for found in gloo_pool.run(layout.mesh, failing, layout):
        assert found == pytest.approx(norms, rel=1e-10)


class Stealing(nn.Module):
    """Reads what is inside a block without calling it, or is given it by the block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.giver = Giver()
        self.how = how

    def forward(self, y: Tensor) -> Tensor:
        z: Tensor = y @ self.giver(y) if self.how == "given" else y @ self.inner.weight
        return z


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, _: Tensor) -> Tensor:
        return self.weight.T


def stealing(groups: Groups, layout: Layout, how: str) -> str:
    model = parallelize(
        Stealing(how).double(), layout, optimizer=ADAMW, loss=mean_square, groups=groups, units=(nn.Linear, Giver)
    )
    with pytest.raises(RuntimeError) as caught:
        model.step([x()])
    with pytest.raises(RuntimeError, match="divided among the ranks"):
        model.module.state_dict()
    assert model.state_dict()["inner.weight"].shape == (4, 4)
    assert "inner.weight" in repr(model.module.inner.weight)
    assert model.module.inner.weight.numel() == 16
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("read", "inner.weight is divided among the ranks and was read outside of a call of its block"),
        ("given", "giver returns one of its own parameters, or a view of it"),
    ],
)
def test_parameters_that_leave_their_block_are_an_error_and_no_crash(
    gloo_pool: RankPool, how: str, message: str
) -> None:
    layout = Layout.parse("dp2/zero3")
    for found in gloo_pool.run(layout.mesh, stealing, layout, how):
        assert message in found
        assert "make one block" in found


# --- the optimizer that the user sees ---------------------------------------------------------------------------------


def scheduled(groups: Groups, layout: Layout) -> list[float]:
    model = parallelize(net(), layout, optimizer=ADAMW, loss=mean_square, groups=groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(model.optimizer, max_lr=0.1, total_steps=6)
    losses = []
    for _ in range(5):  # a warning is an error here
        losses.append(model.step([x(groups.data.index)]).loss)
        scheduler.step()
    return losses


@pytest.mark.parametrize("text", ["dp2/zero1", "dp2/zero3"])
def test_learning_rate_schedulers_take_the_optimizer_for_one_of_torch(gloo_pool: RankPool, text: str) -> None:
    layout = Layout.parse(text)
    module = net()
    optimizer, losses = ADAMW(module.parameters()), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for _ in range(5):
        optimizer.zero_grad()
        loss = sum(mean_square(module, x(rank)) for rank in range(2)) / 2
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    for found in gloo_pool.run(layout.mesh, scheduled, layout):
        assert found == pytest.approx(losses, rel=1e-10)


def test_losses_may_count_what_they_sum() -> None:
    model = parallelize(net(), "dp1/m2", optimizer=ADAMW, loss=lambda m, y: LossSum(m(y).square().sum(), 2 * len(y)))
    result = model.step([x()[:1], x()[1:]])
    assert result.loss == pytest.approx(mean_square(net(), x()).item(), rel=1e-12)
    assert result.tokens == 6
