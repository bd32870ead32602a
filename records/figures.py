"""The figures of analysis.py: learning curves from training logs, and the paper's figure 2."""

import io
from pathlib import Path

import numpy as np

import runtime

PANELS = {"reward": "reward_mean", "spread of S_i within tasks": "S_std", "infra": "infra_rate",
          "groups without advantage": "zero_adv_A zero_adv_D", "clipped tokens": "clip_A clip_D",
          "largest ratio": "ratio_max_A ratio_max_D", "tokens per response": "len_A len_D",
          "loss": "loss_A loss_D", "seconds": "seconds_rollout seconds_update",
          "gradient norm": "grad_A grad_D", "KL to SFT": "kl_A kl_D"}
FIGURE_2 = {"joint": {"auroc": 0.838, "tau_b": 0.516}, "sft": {"auroc": 0.836, "tau_b": 0.503}}  # the paper's


def figure(panels: int, columns: int = 3):
    """A matplotlib figure without a display, and its first `panels` axes."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    columns = min(columns, panels)
    rows = -(-panels // columns)
    size = (5.2 * columns, 3.6 * rows)
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for i, ax in enumerate(axes.flat):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_visible(i < panels)
    return fig, list(axes.flat)[:panels]


def save_figure(fig, *paths: Path) -> None:
    """Write the figure once per path, in the format that its ending names, and forget it."""
    import matplotlib.pyplot as plt
    for path in paths:
        buffer = io.BytesIO()
        fig.savefig(buffer, format=path.suffix[1:], dpi=120)
        runtime.write_atomic(path, buffer.getvalue())
    plt.close(fig)


# ----------------------------------------------------------------------------------------------------- curves
def drawable(logs: dict[str, dict], panels: dict[str, str]) -> dict[str, list[tuple[str, str]]]:
    """The (run, key) pairs that there are, by the title of their panel. `logs`: by run, what results.read_log
    gives; `panels`: the keys of each by its title, separated by spaces."""
    series = {}
    for title, keys in panels.items():
        if found := [(run, key) for run in logs for key in keys.split() if key in logs[run]]:
            series[title] = found
    return series


def draw_log(logs: dict[str, dict], series: dict, window: int, out: Path) -> None:
    """Draw what is `drawable` against the batch: every batch faintly, its moving average clearly."""
    fig, axes = figure(len(series))
    for ax, (title, found) in zip(axes, series.items()):
        for run, key in found:
            x, y = logs[run][key]
            line, = ax.plot(x, moving_average(y, window), label=f"{run} {key}", linewidth=2)
            ax.plot(x, y, color=line.get_color(), alpha=0.35, linewidth=0.8, marker=".", markersize=3)
        ax.set(title=f"{title} (mean of {window} batches)", xlabel="rollout batch")
        ax.legend(frameon=False, fontsize=8)
    save_figure(fig, out)


def moving_average(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` points (made odd), over those that exist at the two ends."""
    half = min(window // 2, len(y) - 1)
    total, n = (np.convolve(np.pad(v, half), np.ones(2 * half + 1), "valid") for v in (y, np.ones_like(y)))
    return total / n


# --------------------------------------------------------------------------------------------------- figure 2
def draw_figure2(quality: dict, out: Path) -> None:
    """ROC curves and success by completed share, as PNG and SVG. `quality`: by run, what
    results.subgoal_quality gives."""
    fig, (roc, rate) = figure(2)
    for name, q in quality.items():
        roc.plot(*zip(*q["roc"]), marker=".", label=f"{name}: {q['auroc']:.3f}")
        rate.plot([b["share"] for b in q["by_share"]], [b["success"] for b in q["by_share"]], marker="o",
                  label=f"{name}: τ {q['tau_b']:.3f}")
    joint = FIGURE_2["joint"]
    sft = FIGURE_2["sft"]
    roc.plot([0, 1], [0, 1], color="gray", linestyle=":")
    roc.set(title=f"(a) AUROC; paper: {joint['auroc']} joint, {sft['auroc']} SFT",
            xlabel="false positive rate", ylabel="true positive rate")
    rate.set(title=f"(b) Kendall's τ; paper: {joint['tau_b']} joint, {sft['tau_b']} SFT",
             xlabel="completed share of the subtasks", ylabel="success rate",
             xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    for ax in (roc, rate):
        ax.legend(frameon=False)
    save_figure(fig, out.with_suffix(".png"), out.with_suffix(".svg"))
