#define QUIRE_ISA avx2
#include "quantize.inl"
