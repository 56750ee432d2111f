"""Compile once, deploy everywhere: ahead-of-time compiled LLM inference as a vLLM platform."""

__version__ = "0.1.0"
