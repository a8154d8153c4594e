"""A web demo that streams text coloured by who proposed it: `python -m ssr_hf.demo`.

It needs the extra `demo` (gradio), which is loaded when the app is built and not before.
"""

from __future__ import annotations

from .app import build_app, main

__all__ = ["build_app", "main"]
