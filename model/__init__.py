"""A role's network, and who generates with it.

    roles.py      roles as data: checkpoint, temperature, policy or critic or on a server; begin here
    backbone.py   what policy and critic share: a frozen Qwen2.5-VL with one LoRA adapter
    policy.py     a distribution over tokens: samples and log-probs
    critic.py     values at token positions, by named heads
    sharded.py    the whole model as stage 2 trains it: FSDP2, checkpoints, export
    update.py     one role's optimizer steps on a rollout batch, whatever its objective is
    inputs.py     a response (Sample), and texts and screenshots -> ids and tensors
    paths.py      checkpoints and adapters: which directory is meant, and what is read from it
    engine.py     who generates in stage 3: this process or a fleet of vLLM servers
    remote.py     models on OpenAI-compatible servers as roles; llm.py asks such a server one question,
                  batches_api.py many at half the price
    attention.py  packed rows; flops.py counts operations
"""
