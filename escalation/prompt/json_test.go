package prompt

import (
	"encoding/json"
	"reflect"
	"testing"
)

func TestSR8JSONKeepsEveryByte(t *testing.T) {
	q := hostile()
	q.Digest = [32]byte{1, 2}
	b, err := json.Marshal(q)
	if err != nil {
		t.Fatal(err)
	}
	var got Request
	if err := json.Unmarshal(b, &got); err != nil || !reflect.DeepEqual(got, q) {
		t.Errorf("%v\n%+v\n%+v", err, got, q)
	}
}
