"""The vLLM engine, in the trainer's process or in one of its own. vLLM is imported inside functions alone."""
