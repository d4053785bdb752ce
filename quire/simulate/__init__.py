"""The simulator: load through routing, admission and the real scheduler, with a step-time model and a virtual clock. No torch."""
