"""Decoding: the engine, guidance, filtering and noise that every sampler shares."""
