#define QUIRE_ISA avx2
#include "linear.inl"
