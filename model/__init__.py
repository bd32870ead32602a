"""A role's network, and who generates with it.

    policy.py     a role's distribution over tokens: samples and log-probs; begin here
    backbone.py   what policy and critic share: a frozen Qwen2.5-VL with one LoRA adapter
    inputs.py     a response (Sample), and texts and screenshots -> ids and tensors
    engine.py     who generates in stage 3: this process or a fleet of vLLM servers
    remote.py     models on OpenAI-compatible servers as roles; llm.py asks such a server one question
    attention.py, flops.py   packed rows; operations counted
"""
