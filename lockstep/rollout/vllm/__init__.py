"""The vLLM engine, in the trainer's process or in a separate one. vLLM is imported only inside functions."""
