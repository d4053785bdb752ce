"""Native CPU kernels: C++ in csrc/, built as the extension `_native`; absent in a source tree that was not installed."""
