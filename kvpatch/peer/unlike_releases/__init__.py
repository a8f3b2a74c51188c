"""A P of another vLLM release: asked in its own words, and its words put into ours."""
