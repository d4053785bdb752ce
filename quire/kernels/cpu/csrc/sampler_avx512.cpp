#define QUIRE_ISA avx512
#include "sampler.inl"
