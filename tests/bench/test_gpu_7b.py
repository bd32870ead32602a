"""The arithmetic of bench/gpu_7b.py against numbers known from elsewhere, and a rehearsal of what it measures
on a GPU."""

import json

import pytest
import torch

from bench import gpu_7b
from bench.simulate import Config
from model import flops
from model.inputs import Inputs


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


def test_rl_rehearsed_encodes_each_screenshot_of_generation_and_none_again(capsys, monkeypatch):
    torch.set_num_threads(1)                      # the cores are shared
    seen, pixels = [], Inputs.pixels
    monkeypatch.setattr(Inputs, "pixels", lambda self, pngs: seen.extend(pngs) or pixels(self, pngs))
    gpu_7b.rl(gpu_7b.RlConfig(rehearse=True))
    assert len(seen) == len(set(seen)) == 2 * 2 * (1 + 2)            # two batches, of one token and of three
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["image_tokens"] == 6 and result["prompt_tokens"] == pytest.approx(60, abs=3)
    assert result["update_samples_per_s"] > 0 and set(result["tokens_per_s"]) == {"1", "2"}
    assert set(result["costs"]) == {"prefill_s", "decode_s", "decode_row_s", "train_s"} <= set(vars(Config()))
