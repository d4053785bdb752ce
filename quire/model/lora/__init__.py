"""LoRA adapters in the layout of PEFT: their files, their weights by canonical names, and what they add to linear layers."""
