"""`python -m ssr_hf.demo`."""

from __future__ import annotations

from .app import main

main()
