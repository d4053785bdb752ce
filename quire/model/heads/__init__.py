"""Draft heads: their stored layouts, and the classes that run them."""
