#define QUIRE_ISA avx512
#include "peak.inl"
