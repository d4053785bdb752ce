#define QUIRE_ISA avx2
#include "recurrence.inl"
