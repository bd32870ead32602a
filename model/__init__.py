"""A role's network: what it reads, the frozen base with its adapter, and what is made of its hidden states.

inputs.py     Sample, and texts and screenshots -> ids and tensors
backbone.py   a Qwen2.5-VL, frozen, with one LoRA adapter: begin here
critic.py     hidden states -> values, by named heads
"""
