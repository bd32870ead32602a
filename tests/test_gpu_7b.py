"""The arithmetic of bench/gpu_7b.py against numbers known from elsewhere; what it measures needs a GPU."""

import pytest

import flops
from bench import gpu_7b


@pytest.fixture(scope="module")
def config():
    return gpu_7b.config_7b()


def test_the_7b_has_its_published_parameters(config):
    n = gpu_7b.parameters(config)
    assert n["all"] == 8_292_166_656 and n["layers"] == 28 * 233_057_792


def test_operations_are_those_of_the_7b(config):
    """A token costs 2 x 6.53 G in the layers; a 1280x720 screenshot 6.66 T in the tower and its merger."""
    per_token = flops.language_flops(config.text_config, [1], 0)
    assert per_token == pytest.approx(2 * 28 * 233.05e6, rel=1e-3)
    assert sum(flops.vision_flops(config.vision_config, [(1, 52, 92)])) == pytest.approx(6.66e12, rel=0.02)


def test_a_packed_row_fits_into_80_gb_on_eight_and_not_on_two(capsys):
    eight = gpu_7b.sft_arithmetic(gpu_7b.SftConfig())
    assert eight["fits"] and eight["gb_per_gpu"] > 133 / 8
    assert not gpu_7b.sft_arithmetic(gpu_7b.SftConfig(gpus=2))["fits"]
    frozen = gpu_7b.sft_arithmetic(gpu_7b.SftConfig(freeze_vision=True))
    assert frozen["gb_per_gpu"] < eight["gb_per_gpu"] and frozen["tflop_per_row"] < eight["tflop_per_row"]
    assert "GB  of 80 on each of 8 GPUs" in capsys.readouterr().out
