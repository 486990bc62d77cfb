"""Gradient noise scale: correct where the truth is known, silent where it cannot be measured."""

from __future__ import annotations

import math
import os

import pytest
import torch

from envscaler_agent.frameworks.noise import GradientNoise, NoiseScale


def test_norms_in_expectation_give_the_noise_scale_at_once():
    """|G|^2 = 4 and S = 320: batches of 8 and 64 have squared norms 44 and 9, and the scale is 80."""
    scale = NoiseScale()
    scale.add(small=4 + 320 / 8, small_batch=8, large=4 + 320 / 64, large_batch=64)

    assert scale.samples == pytest.approx(80)


def test_the_means_are_taken_before_the_quotient():
    """Two measurements: each alone is far off, and their means are exact."""
    scale = NoiseScale(smoothing=0.5)
    scale.add(small=2 * 44, small_batch=8, large=2 * 9, large_batch=64)
    scale.add(small=44 / 2, small_batch=8, large=9 / 2, large_batch=64)

    assert scale.samples == pytest.approx(80)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_that_overflowed_is_left_out(norm):
    """The scale is unknown afterwards, and NaN does not propagate."""
    scale = NoiseScale()
    scale.add(small=norm, small_batch=8, large=1.0, large_batch=64)

    assert scale.samples is None


def test_a_gradient_that_does_not_rise_above_the_noise_is_unknown():
    """At |G| = 0 the scale is infinite: reported as unknown, not as a number."""
    scale = NoiseScale()
    scale.add(small=8.0, small_batch=8, large=1.0, large_batch=64)

    assert scale.samples is None


def test_batches_of_one_size_are_refused():
    """They carry no information, and would cause a division by zero."""
    with pytest.raises(ValueError, match="not larger"):
        NoiseScale().add(small=1.0, small_batch=8, large=1.0, large_batch=8)


def noisy(weight, batch, generator):
    """Mean of (w - x)^2 / 2 with x ~ N(0, 1) in each of 50 places: gradient w, variance 1 in each."""
    x = torch.randn(batch, 50, generator=generator)
    return ((weight - x) ** 2).sum(dim=1).mean() / 2


class Watched:
    """A session that stores reported values."""

    def __init__(self):
        """Start empty."""
        self.reported = []

    def report(self, **fields):
        """Store one value."""
        self.reported.append(fields["noise_scale"])


def test_passes_of_one_rank_find_the_known_scale():
    """At w = 0.5 in 50 places: S = 50, |G|^2 = 12.5, so B = 4 samples; 400 measurements come within 10 %."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((50,), 0.5))])
    generator = torch.Generator().manual_seed(1)
    session = Watched()
    noise = GradientNoise(model, session, global_batch=32, every=1)
    noise._scale = NoiseScale(smoothing=0.99)
    for _ in range(400):
        for _ in range(4):
            (noisy(model[0], 8, generator) / 4).backward()
            noise.after_backward()
        noise.before_step()
        model.zero_grad()

    assert noise.samples == pytest.approx(4, rel=0.1)
    assert session.reported[-1] == noise.samples


def scale_of(divide):
    """The result of three measurements when the loss is divided by *divide*."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((50,), 0.5))])
    generator = torch.Generator().manual_seed(1)
    noise = GradientNoise(model, Watched(), global_batch=32, every=1)
    for _ in range(4):
        for _ in range(4):
            (noisy(model[0], 8, generator) / divide).backward()
            noise.after_backward()
        noise.before_step()
        model.zero_grad()
    return noise.samples


def test_it_does_not_matter_whether_passes_are_summed_or_averaged():
    """A factor on the loss, also an AMP scaler's, cancels out."""
    assert scale_of(1) == pytest.approx(scale_of(4))
    assert scale_of(1) == pytest.approx(scale_of(1 / 1024))


def test_one_pass_a_step_has_nothing_to_compare_and_steps_between_looks_cost_nothing():
    """Nothing is reported; on steps without a measurement no gradient is copied."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])
    session = Watched()
    noise = GradientNoise(model, session, global_batch=8, every=4)
    copied = []
    for _ in range(8):
        model[0].sum().backward()
        noise.after_backward()
        copied.append(len(noise._squares))
        noise.before_step()

    assert copied == [1, 0, 0, 0, 1, 0, 0, 0]
    assert session.reported == []


def of_ranks(rank, world_size, port, found):
    """One rank: 100 measurements of gradients that the ranks average."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((50,), 0.5))

        def forward(self, x):
            return ((self.w - x) ** 2).sum(dim=1).mean() / 2

    model = torch.nn.parallel.DistributedDataParallel(Net())
    plain = Net()
    generator = torch.Generator().manual_seed(rank)
    noise = GradientNoise(model, Watched(), global_batch=16, every=2)
    noise._scale = NoiseScale(smoothing=0.99)
    is_averaged = True
    for _ in range(600):
        x = torch.randn(8, 50, generator=generator)
        model(x).backward()
        plain(x).backward()
        mean = plain.w.grad.clone()
        torch.distributed.all_reduce(mean)
        is_averaged &= torch.allclose(model.module.w.grad, mean / world_size)
        noise.before_step()
        model.zero_grad()
        plain.zero_grad()
    found.put((rank, noise.samples, is_averaged))
    torch.distributed.destroy_process_group()


def test_ranks_find_the_known_scale_and_their_gradients_stay_what_they_were():
    """Two ranks of 8: B = 4 samples within a sixth, the same on both; DDP's average is not touched."""
    context = torch.multiprocessing.get_context("spawn")
    found = context.Queue()
    port = _free_port()
    ranks = [context.Process(target=of_ranks, args=(rank, 2, port, found)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    said = sorted(found.get(timeout=60) for _ in ranks)
    for each in ranks:
        each.join(timeout=30)

    assert [is_averaged for _, _, is_averaged in said] == [True, True]
    assert said[0][1] == pytest.approx(4, rel=1 / 6)
    assert said[0][1] == pytest.approx(said[1][1])


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
