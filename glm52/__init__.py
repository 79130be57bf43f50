"""A literate inference engine for GLM-5.2: exact, reproducible, replayable, readable."""
__version__ = "0.1.0"

_PUBLIC = {"LLM": "glm52.engine.engine", "AsyncEngine": "glm52.engine.engine", "SamplingParams": "glm52.engine.sampling"}
__all__ = ["LLM", "AsyncEngine", "SamplingParams"]


def __getattr__(name):
    "Import the public names on first use: `import glm52` costs nothing."
    if name not in _PUBLIC: raise AttributeError(f"module 'glm52' has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(_PUBLIC[name]), name)
