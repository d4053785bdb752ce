#define QUIRE_ISA avx512
#include "recurrence.inl"
