#define QUIRE_ISA avx2
#include "sampler.inl"
