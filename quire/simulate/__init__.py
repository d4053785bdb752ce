"""The simulator: load through routing and the real scheduler, with modelled step times on a virtual clock. No torch."""
