#define QUIRE_ISA portable
#include "sampler.inl"
