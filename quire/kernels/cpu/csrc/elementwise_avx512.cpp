#define QUIRE_ISA avx512
#include "elementwise.inl"
