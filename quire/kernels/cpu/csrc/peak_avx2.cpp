#define QUIRE_ISA avx2
#include "peak.inl"
