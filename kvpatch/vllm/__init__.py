"""What differs between vLLM's generations: worker objects in, geometry out.

Nothing here decides anything. It says, per generation, where a worker keeps a
fact that a patch needs, and how to hand it one that stock takes for granted.
"""
