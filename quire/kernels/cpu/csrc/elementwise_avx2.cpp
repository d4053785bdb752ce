#define QUIRE_ISA avx2
#include "elementwise.inl"
