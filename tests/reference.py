"""Samples for a policy, and their log-probs by transformers alone."""

import torch
from conftest import png

from model.inputs import Sample


def make_sample(policy, seed, response, user="Where is the cart?", image=None):
    image = image or png(seed)
    prompt_ids, size = policy.encode("Do the next step.", user, image)
    return Sample(prompt_ids, image, size, list(response))


def three_samples(policy):
    """Three samples with prompts, images and responses of different lengths."""
    end = policy.inputs.end_id
    return [make_sample(policy, 1, [5, 9, 300, 17, end], "Click"),
            make_sample(policy, 2, [40, end], "Scroll down to the very end of the page", png(2, (112, 84))),
            make_sample(policy, 3, [7, 7, 8, 300, 301, 302, 9, end], "x")]


def reference_logp(policy, sample, T=0.8, **change):
    """log π of one sample without padding, by transformers' own forward pass and a float64 softmax."""
    inputs = policy.inputs.batch([sample.prompt_ids + sample.response_ids], [sample.png]) | change
    with torch.no_grad():
        logits = policy.model(**inputs).logits[0].double() / T
    logits[:, policy.inputs.banned] = -torch.inf
    rows = logits[len(sample.prompt_ids) - 1:-1].log_softmax(-1)
    return rows[range(len(rows)), sample.response_ids]


def assert_same(got, wanted, tolerance):
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        assert not len(w) or (g.double() - w.double()).abs().max() <= tolerance
