"""A role's network, and who generates with it.

    policy.py     base + adapter: prompt -> tensors, samples, log-probs; begin here
    engine.py     who generates in stage 3: this process or a fleet of vLLM servers
    remote.py     models on OpenAI-compatible servers as roles; llm.py asks such a server one question
    attention.py, flops.py   packed rows; operations counted
"""
