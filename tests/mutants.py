"""Break the mathematics on purpose, one fault at a time, and see which test notices.

    python tests/mutants.py                # all faults, two at a time: about ten minutes on 2 cores
    python tests/mutants.py --only clip    # those with "clip" in their name

Each fault is one replaced piece of source in a copy of the project; the copy's tests of the equations run first, then
those of the policy and of the update, until one fails. A line per fault says which. A fault that no test notices is a
gap in the tests. The last line is JSON: {"mutants": how many, "caught": how many of them a test noticed}.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime  # noqa: E402  (the project root is not a package)


@dataclass
class Config:
    only: str = ""                       # run the faults whose name contains this
    jobs: int = 2                        # copies under test at the same time


class Mutant(NamedTuple):
    name: str
    file: str
    old: str                             # must occur exactly once (test_house.py sees to that)
    new: str


def faults(file, **pairs):
    return [Mutant(name.replace("_", " "), file, *pair) for name, pair in pairs.items()]


MUTANTS = [
    # Eqs. 5, 8, 9: advantages
    *faults("grpo_hier.py",
            population_std=("(n - 1).clamp(min=1)).sqrt()", "n.clamp(min=1)).sqrt()"),
            std_without_delta=(".sqrt() + std_eps)", ".sqrt())"),
            std_always_on=("    if std:\n", "    if True:\n"),
            mean_over_the_batch_instead_of_the_group=(
                "    mean = torch.where(valid, x, 0).sum(-1, keepdim=True) / n.clamp(min=1)",
                "    mean = torch.where(valid, x, 0).sum() / valid.sum().clamp(min=1)"),
            lost_episodes_count_as_failures_in_the_mean=("    n = valid.sum(-1, keepdim=True)\n",
                                                         "    n = torch.full_like(valid[..., :1].long(), x.shape[-1])\n"),
            lost_episodes_count_as_failures_in_S=("/ n_BK.clamp(min=1), n_BK > 0", "/ R_BKM.shape[-1], n_BK > 0"),
            S_needs_two_episodes=("n_BK.clamp(min=1), n_BK > 0", "n_BK.clamp(min=1), n_BK > 1"),
            equal_rewards_leave_a_rounding_error=("torch.where(spread & valid, d, 0)", "d"),
            leave_one_out_baseline=("    d = torch.where(valid, x - mean, 0)\n",
                                    "    d = torch.where(valid, x - mean, 0) * n / (n - 1).clamp(min=1)\n"),
            the_actor_gets_the_decomposer_s_advantage=("A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]))",
                                                       "A.adv.append(float(adv_D_BK[g, plan.k]))"),
            advantage_divided_over_the_steps=("A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]))",
                                              "A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]) / len(episode.steps))"),
            advantage_of_another_plan=("float(adv_A_BKM[g, plan.k, episode.m])", "float(adv_A_BKM[g, 0, episode.m])"),
            lost_episodes_are_trained_on=("for step in episode.steps if episode.reward is not None else ():",
                                          "for step in episode.steps:"),
            T_ij_is_always_1=("A.T.append(len(episode.steps))", "A.T.append(1)")),
    # Eq. 6, the clip, the KL term
    *faults("grpo_hier.py",
            ratio_upside_down=("(logp_NT - logp_old_NT).exp()", "(logp_old_NT - logp_NT).exp()"),
            max_for_min=("return torch.minimum(", "return torch.maximum("),
            clip_from_above_only=(".clamp(1 - eps, 1 + eps)", ".clamp(max=1 + eps)"),
            clip_from_below_only=(".clamp(1 - eps, 1 + eps)", ".clamp(min=1 - eps)"),
            clip_without_the_min=("torch.minimum(r_NT * adv_N[:, None], r_NT.clamp", "(r_NT.clamp"),
            clip_wider_above=(".clamp(1 - eps, 1 + eps)", ".clamp(1 - eps, 1 + 1.4 * eps)"),
            kl_the_wrong_way_round=("d_NT = logp_ref_NT - logp_NT", "d_NT = logp_NT - logp_ref_NT"),
            kl_is_rewarded=("term_NT - cfg.beta * kl_NT", "term_NT + cfg.beta * kl_NT"),
            kl_to_the_policy_itself=("policy.logp(samples, T, reference=True)", "policy.logp(samples, T)")),
    # Eqs. 7, 7', 10, 10', 11: divisors
    *faults("grpo_hier.py",
            actor_loss_not_divided_by_M=("/ (B * K * M * C_A)", "/ (B * K * C_A)"),
            actor_loss_as_a_mean_over_the_micro_batch_s_tokens=("/ (B * K * M * C_A)", "/ mask_NT.sum().clamp(min=1)"),
            actor_loss_divided_by_padded_width=("/ (B * K * M * C_A)", "/ (B * K * M * term_NT.shape[1])"),
            printed_loss_not_divided_by_T=(".clamp(min=1) / T_N).sum()", ".clamp(min=1)).sum()"),
            printed_loss_divided_by_padded_width=("mask_NT.sum(1).clamp(min=1) / T_N)", "mask_NT.shape[1] / T_N)"),
            decomposer_loss_not_divided_by_K=("/ (B * K * C_D)", "/ (B * C_D)"),
            decomposer_loss_divided_by_M=("return loss_D(term_NT, mask_NT, B, K, cfg",
                                          "return loss_D(term_NT, mask_NT, B, K * cfg.M, cfg"),
            printed_plan_loss_not_divided_by_its_length=("/ mask_NT.sum(1).clamp(min=1)).sum() / (B * K)",
                                                         ").sum() / (B * K)"),
            C_A_without_max_steps=("cfg.max_steps * cfg.max_tokens_A)", "cfg.max_tokens_A)"),
            difference_of_the_two_losses=("return L_A + L_D", "return L_A - L_D"),
            padding_is_trained_on=("torch.ones_like(r.detach()) for r in rows], batch_first=True)",
                                   "torch.ones_like(r.detach()) for r in rows], batch_first=True, padding_value=1)")),
    # the update
    *faults("grpo_hier.py",
            temperature_of_the_other_role=('if policy.role == "actor" else cfg.temperature_D',
                                           'if policy.role != "actor" else cfg.temperature_D'),
            old_log_probs_renewed_in_pass_2=("            if step == 0: ", "            if True: "),
            gradient_of_pass_1_kept=("p.grad = torch.zeros_like(p)", "p.grad = torch.zeros_like(p) if p.grad is None "
                                                                     "else p.grad"),
            gradients_not_summed_over_ranks=("    all_reduce_flat_([p.grad for p in parameters])\n", ""),
            last_micro_batch_dropped=("for i in range(0, len(order), cfg.micro_batch)]",
                                      "for i in range(0, len(order) - cfg.micro_batch + 1, cfg.micro_batch)]"),
            statistics_of_one_rank_only=("sums = torch.tensor(gather_objects(sums.tolist(), world)).sum(0)",
                                         "sums = sums"),
            optimizer_not_restored=("            optimizers[role].load_state_dict(", "            str("),
            schedule_depends_on_the_number_of_ranks=('random.Random(f"{cfg.seed} {epoch}")',
                                                     'random.Random(f"{cfg.seed} {epoch} {world_size}")')),
    # the policy's log-probs, tokens and masks
    *faults("policy.py",
            temperature_forgotten=("(logits.float() / T).index_fill_", "(logits.float() / 1).index_fill_"),
            banned_ids_allowed=(".index_fill_(-1, banned, -torch.inf)", ""),
            log_prob_gradient_without_temperature=("@ W_VH) / Z) / T if", "@ W_VH) / Z) if"),
            log_prob_gradient_of_the_chosen_token_only=("W_VH[y].float() - (e.to(W_VH.dtype) @ W_VH) / Z)",
                                                        "W_VH[y].float())"),
            log_probs_one_position_late=("h_NSH[i, len(p) - 1:len(p) - 1 + len(r)]", "h_NSH[i, len(p):len(p) + len(r)]"),
            sampled_end_left_out=("(i + 1 for i, t in enumerate(ids)", "(i for i, t in enumerate(ids)"),
            only_one_end_is_known=("sorted({self.end_id, self.pad_id})", "[self.end_id]"),
            filler_after_the_end_kept=("        ids = ids[:end]\n", ""),
            limit_of_the_longest_request_for_all=("        ids = ids[:q.max_new_tokens]\n", ""),
            attention_to_padding=("ids[i, at], mask[i, at] = torch.tensor(row), 1", "ids[i, at], mask[i] = torch.tensor(row), 1"),
            image_types_forgotten=('"mm_token_type_ids": (ids == self.image_id).long()',
                                   '"mm_token_type_ids": torch.zeros_like(ids)'),
            images_in_another_order=("for png in pngs], return_tensors", "for png in pngs[::-1]], return_tensors"),
            missing_token_types_accepted=('if "mm_token_type_ids" not in inputs:', "if False:"),
            sampler_noise_of_one_sign=(".exponential_(generator=g).log_().neg_()", ".exponential_(generator=g).log_()"),
            one_seed_for_all_requests=("manual_seed(s) for s in seeds]", "manual_seed(0) for s in seeds]"),
            response_written_again_from_its_text=("        prompts, responses = [s.prompt_ids for s in samples], "
                                                  "[s.response_ids for s in samples]\n",
                                                  "        prompts, responses = [s.prompt_ids for s in samples], [self.inputs."
                                                  "tokenizer(s.text)['input_ids'] for s in samples]\n")),
    # the adapter
    *faults("policy.py",
            dropout_acts=("adapter_name=role).eval()", "adapter_name=role).train()"),
            lora_on_the_vision_tower_too=('r".*language_model.*\\.(q_proj', 'r".*\\.(q_proj'),
            reference_with_the_adapter=("self.peft.disable_adapter() if reference", "torch.no_grad() if reference"),
            any_adapter_name_accepted=('if role in n.split(".")]', "if False]"),
            adapter_that_does_not_fit_accepted=("        if mine != set(state):\n", "        if False:\n")),
    # Eqs. 3, 4
    *faults("sft.py", sft_loss_as_a_mean_per_micro_batch=("return -logp_n.sum() / n_tokens", "return -logp_n.mean()")),
]
TESTS = ("test_equations", "test_grpo_hier", "test_policy")


def copy(directory: Path) -> None:
    """The sources and the tests that are run; no data, no environment."""
    for pattern in ("*.py", "pyproject.toml", "demo/*", "bench/*.py", "tests/*.py"):
        for file in ROOT.glob(pattern):
            if file.is_file():
                target = directory / file.relative_to(ROOT)
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file, target)


def first_failure(directory: Path, about: str = "") -> str:
    """The first test that fails in a copy, "" when all pass; those of the room `about` run first."""
    for name in sorted(TESTS, key=lambda test: (about != "policy") if test == "test_policy" else 0.5):
        process = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}.py"],
                                 cwd=directory, capture_output=True, text=True)
        if process.returncode:
            found = re.search(r"^(?:FAILED|ERROR) tests/(\S+?)(?: - .*)?$", process.stdout, re.MULTILINE)
            return found[1] if found else f"{name} ended with {process.returncode}: {process.stdout[-200:]}"
    return ""


def check(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        copy(directory)
        file = directory / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise runtime.UserError(f"{mutant.name}: {mutant.file} does not have {mutant.old!r} exactly once; mend the list")
        file.write_text(text.replace(mutant.old, mutant.new))
        return first_failure(directory, file.stem)


def main(cfg: Config) -> None:
    mutants = [m for m in MUTANTS if cfg.only in m.name]
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        if failed := first_failure(Path(name)):
            raise runtime.UserError(f"{failed} fails without any fault; mend that first")
    with ThreadPoolExecutor(cfg.jobs) as pool:
        results = []
        for mutant, caught in zip(mutants, pool.map(check, mutants)):
            results.append(caught)
            print(f"{mutant.name:55} {caught or 'NOT NOTICED'}", flush=True)
    print(json.dumps({"mutants": len(mutants), "caught": sum(map(bool, results))}))


if __name__ == "__main__":
    runtime.launch(main)
