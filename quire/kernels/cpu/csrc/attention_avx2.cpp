#define QUIRE_ISA avx2
#include "attention.inl"
