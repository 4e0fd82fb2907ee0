"""What needs Tunix is imported by its test alone, as doctests import all modules."""

collect_ignore = ["lora.py", "tiny_qwen.py"]
