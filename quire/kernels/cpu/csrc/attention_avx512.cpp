#define QUIRE_ISA avx512
#include "attention.inl"
