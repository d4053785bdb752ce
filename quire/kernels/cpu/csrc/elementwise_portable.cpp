#define QUIRE_ISA portable
#include "elementwise.inl"
