#define QUIRE_ISA avx512
#include "quantize.inl"
