// cuBLAS and cuBLASLt: products are work on their stream.
#include <stddef.h>
#include <string.h>

enum { VERSION = 130100 };
extern int stand_in_work(void *stream);

#ifdef LT
typedef struct {
  unsigned long long algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} Heuristic;

int cublasLtCreate(void **handle) {
  static char bytes[64];
  *handle = bytes;
  return 0;
}

size_t cublasLtGetVersion(void) { return VERSION; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                   void *preference, int asked, Heuristic *found, int *count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return 0;
}

int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a, void *a_layout,
                   const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                   void *d, void *d_layout, const void *algorithm, void *workspace, size_t bytes,
                   void *stream) {
  return stand_in_work(stream);
}
#else
static __thread void *current;

int cublasCreate_v2(void **handle) {
  static char bytes[4096];
  *handle = bytes;
  return 0;
}

int cublasGetVersion_v2(void *handle, int *version) {
  *version = VERSION;
  return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

int cublasSetStream_v2(void *handle, void *stream) {
  current = stream;
  return 0;
}

int cublasGetStream_v2(void *handle, void **stream) {
  *stream = current;
  return 0;
}

int cublasSgemm_v2() { return stand_in_work(current); }
int cublasSgemmStridedBatched() { return stand_in_work(current); }
int cublasGemmEx() { return stand_in_work(current); }
int cublasGemmStridedBatchedEx() { return stand_in_work(current); }
#endif
