"""What a run will take before it is started: batches, memory, and the time that physics asks for."""
