"""What several tests share: the random Qwen2.5-VL of the mathematics, built once per session in a second;
where a page has its elements."""

import dataclasses
import io
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


LONGEST = ("test_stages.py", "test_env_webarena.py", "test_agents.py", "test_scale.py", "test_evaluate.py")


def pytest_collection_modifyitems(items):
    """The longest files first, so that two workers end together."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def random_checkpoint(out: Path, **sizes) -> Path:
    """A checkpoint of demo/tiny_model.py, its matrices enlarged so that outputs depend visibly on inputs."""
    import torch

    from demo import tiny_model
    from model.backbone import load_model
    torch.set_num_threads(1)                      # tensors are small and the cores are shared
    tiny_model.build(tiny_model.Config(str(out / "small"), str(ROOT / "demo" / "prompts.json"), **sizes))
    model = load_model(out / "small")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2)
    shutil.copytree(out / "small", out / "model")
    model.save_pretrained(out / "model")
    return out / "model"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The checkpoint of most tests."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), hidden=64, layers=2, vision_hidden=32,
                             vocabulary=704)


@pytest.fixture(scope="session")
def make_policy(tiny_model):
    """make_policy(role, ...) -> Policy on the tiny model, its adapter moved from zero (with seed `moved`)."""
    import torch

    from model.policy import Policy

    def make(role="actor", moved=1, **settings):
        policy = Policy(tiny_model, role, **{"r": 4, "alpha": 8} | settings)
        if moved:
            generator = torch.Generator().manual_seed(moved)
            for p in policy.parameters().values():
                p.data += 0.05 * torch.randn(p.shape, generator=generator)
        return policy
    return make


@pytest.fixture(scope="session")
def policy(make_policy):
    """An actor that no test may change."""
    return make_policy()


@pytest.fixture(scope="session")
def tabs():
    """Centres of click-tab's tabs, in page pixels: their number -> (x, y)."""
    from sites.miniwob import MiniWob
    from web.environment import RolloutConfig
    from web.session import Session
    environment = MiniWob("click-tab", instances=1)
    session = Session(environment, RolloutConfig())
    session.open(environment.tasks("eval")[0])
    boxes = {n: session.page.locator(f"a[href='#tabs-{n}']").bounding_box() for n in (1, 2, 3)}
    session.stop()
    environment.close()
    return {n: (round(b["x"] + b["width"] / 2), round(b["y"] + b["height"] / 2)) for n, b in boxes.items()}


@pytest.fixture(scope="module")
def browser():
    """A bare Chromium of Playwright's, without a session around it."""
    from playwright.sync_api import sync_playwright

    from web.chromium import CHROMIUM_ARGS, chromium
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of 1280 x 720 in a context of its own."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    context.set_default_timeout(20_000)
    yield context.new_page()
    context.close()


def png(seed: int, size=(56, 56)) -> bytes:
    """A screenshot of noise: four image tokens."""
    import torch
    dice, out = torch.Generator().manual_seed(seed), io.BytesIO()
    pixels = torch.randint(256, (size[1], size[0], 3), generator=dice, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(out, "PNG")
    return out.getvalue()


def request(seed: int, user="Where is the cart?", temperature=0.8, max_new_tokens=12, image=None):
    """What Policy.sample needs to know of one prompt."""
    return SimpleNamespace(system="Do the next step.", user=user, png=image or png(seed), seed=seed,
                           temperature=temperature, max_new_tokens=max_new_tokens)


def draw(policy, n: int, seed=0) -> list:
    """Samples of different lengths."""
    return policy.sample([request(seed + i, "word " * (i % 3), max_new_tokens=3 + i % 4) for i in range(n)])


def small_config(**settings):
    """Stage 3's settings at the size of these tests."""
    import grpo_hier
    small = {"K": 2, "M": 3, "max_steps": 3, "max_tokens_A": 8, "max_tokens_D": 12, "temperature_A": 0.8,
             "temperature_D": 0.7, "micro_batch": 3, "max_norm": 1e9}
    return dataclasses.replace(grpo_hier.Config(), **small | settings)


def learn(policy, optimizer, rows, B: int, cfg, world=None) -> dict:
    """An update of the policy's role with the paper's objective, as `train` makes it."""
    import grpo_hier
    from model.update import update
    from runtime import World
    role = next(role for role in grpo_hier.roles(cfg) if role.name == policy.role)
    rows = [row for row in rows if grpo_hier.teaches(row, cfg)]
    objective = partial(grpo_hier.loss, role.name, B=B, cfg=cfg)
    return update(role, policy, optimizer, rows, objective, cfg, world or World())
