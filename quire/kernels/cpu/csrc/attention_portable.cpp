#define QUIRE_ISA portable
#include "attention.inl"
