#define QUIRE_ISA portable
#include "recurrence.inl"
