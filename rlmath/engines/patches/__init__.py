"""Every change that rlmath makes to vLLM. README.md lists them, with reasons and gains."""
