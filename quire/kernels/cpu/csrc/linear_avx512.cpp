#define QUIRE_ISA avx512
#include "linear.inl"
