// The C ABI. Every function enqueues on `stream` (a cudaStream_t) of the current device and returns at once; before that
// it copies its descriptors. It returns null, or a static text that says what went wrong.
#pragma once

#include "fenceline/arena_fill.h"
#include "fenceline/page_copy.h"

extern "C" {
const char* fenceline_arena_fill(const fenceline::FillField* fields, int32_t num_fields, int64_t num_live,
                                 const int64_t* num_live_ptr, void* stream);
// By SMs: one launch, except as copy_pages says.
const char* fenceline_copy_pages(fenceline::PageCopyRequest* request, void* stream);
// By the copy engine: one batch of plain copies, and one copy for each strided piece.
const char* fenceline_copy_pages_direct(fenceline::PageCopyRequest* request, void* stream);
}
